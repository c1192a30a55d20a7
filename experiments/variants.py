"""
Which half of the conflict rule does it? train.py with other conflict weights than equation (2):

    python -m experiments.variants protect_only --out=out/protect_only ...   # train.py's flags

It is also an example of how to try a rule of one's own without a change of gtpo.py. In the log,
`conflict` is the share of tokens whose weight is not 1.
"""
import torch
import torch.nn.functional as F

import train
from gtpo import advantage_sign, conflict_weights
from lib.run import command, end


def protect_only(ids, mask, advantages):
    """0 where A < 0; conflict tokens of good completions count once."""
    return conflict_weights(ids, mask, advantages).clamp(max=1)


def amplify_only(ids, mask, advantages):
    """2 where A > 0; conflict tokens of bad completions are punished like others."""
    return conflict_weights(ids, mask, advantages).clamp(min=1) * mask


def double_good(ids, mask, advantages):
    """2 on every token of a good completion, conflict or not; 1 on those of the others."""
    return (1.0 + (advantage_sign(advantages) > 0))[..., None] * mask


def own_ids(ids):
    """An id that is in no vocabulary for each completion of a group: ids (..., G, L)
    -> (..., G, 1)."""
    return 2**30 + torch.arange(ids.shape[-2], device=ids.device).expand(ids.shape[:-1])[..., None]


def prefix_only(ids, mask, advantages):
    """Conflict tokens in the common beginning alone: an end of its own leaves no common end."""
    own = own_ids(ids)  # (..., G, 1)
    length = mask.sum(-1, keepdim=True)  # (..., G, 1)
    longer = F.pad(ids, (0, 1)).scatter(-1, length, own)  # (..., G, L + 1)
    weights = conflict_weights(longer, F.pad(mask, (0, 1)).scatter(-1, length, True), advantages)
    return weights[..., :-1] * mask


def suffix_only(ids, mask, advantages):
    """Conflict tokens in the common end alone: a beginning of its own leaves no common one."""
    own = own_ids(ids)  # (..., G, 1)
    longer = torch.cat([own, ids], -1)  # (..., G, L + 1)
    return conflict_weights(longer, F.pad(mask, (1, 0), value=True), advantages)[..., 1:]


VARIANTS = {rule.__name__: rule for rule in (protect_only, amplify_only, double_good, prefix_only,
                                             suffix_only)}


def main(argv):
    if not argv or argv[0] not in VARIANTS:
        raise ValueError(f"the first word must be one of {', '.join(VARIANTS)}; train.py's flags "
                         "follow")
    if not any(word.startswith("--out=") and argv[0] in word for word in argv):
        raise ValueError(f"--out must hold the name {argv[0]}: a run's settings do not know its "
                         "rule, and no run should mix two")
    train.conflict_weights = VARIANTS[argv[0]]
    return train.main(argv[1:])


if __name__ == "__main__":
    end(command(main))
