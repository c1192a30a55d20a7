"""lib/graph.py and what sample.py makes of it. A CPU has no CUDA graphs: a recorder does what they
do, with one operation of torch after the other. Where there is a GPU, real ones are tested, too."""
import contextlib
import functools
import sys
import weakref
from types import SimpleNamespace

import pytest
import test_sample
import torch
from conftest import spied
from test_sample import PROMPTS, same, sixth_even, uniforms
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import sample as sample_py
from lib import graph
from sample import GroupCache, sample
from tools.bench import Count

# a graph can neither tell the host a value, be it a shape, nor get one, but for plain numbers
FORBIDDEN = {"_local_scalar_dense", "nonzero", "repeat_interleave", "equal", "lift_fresh", "set_",
             "resize_"}
DEVICES = "cpu", *["cuda"] * torch.cuda.is_available()
models = test_sample.models  # a fixture


class Recording(TorchDispatchMode):
    """In place of graph.capture(): records the operations of step(t), and leaves all tensors as
    they were. Called, it does them again, on the very memory, with the very numbers; memory from
    outside must still be there, what the step made itself belongs to the recording."""

    def __init__(self, step, t):
        super().__init__()
        self.operations, self.made, self.before, self.replays = [], {}, {}, 0
        try:
            with self:
                step(t)
        finally:
            for storage, values in self.before.values():
                storage.copy_(values)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__.split(".")[0], kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        by_mask = "index" in name and any(x.dtype == torch.bool for x in given[1:])
        if name in FORBIDDEN or by_mask:
            raise RuntimeError(f"{name}: not permitted when stream is capturing")
        # autocast would keep it and give it to those outside, when it holds nothing yet
        assert not (name == "_to_copy" and isinstance(args[0], torch.nn.Parameter))
        with _disable_current_modes():
            for x, argument in zip(args, func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    storage = x.untyped_storage()
                    if storage._cdata not in self.before:
                        self.before[storage._cdata] = storage, storage.clone()
            arguments = tree_map(self.hold, (args, kwargs))
            out = func(*args, **kwargs)
        self.made.update((id(x), x) for x in tree_leaves(out) if not any(x is y for y in given))
        self.operations.append((func, arguments, out))
        return out

    def hold(self, x):
        outside = isinstance(x, torch.Tensor) and id(x) not in self.made
        return weakref.ref(x) if outside else x

    def __call__(self, t):
        def there(x):
            if isinstance(x, weakref.ref):
                x = x()
                assert x is not None, "memory that was freed"
            return x

        self.replays += 1
        with _disable_current_modes(), torch.autocast("cpu", enabled=False):
            for func, arguments, out in self.operations:
                args, kwargs = tree_map(there, arguments)
                new = func(*args, **kwargs)
                for old, x in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    if x.untyped_storage()._cdata != old.untyped_storage()._cdata:
                        old.copy_(x)


@pytest.fixture
def recordings(monkeypatch):
    """Steps on a CPU are captured, too. The list of what was."""
    made, real = [], graph.capture

    def capture(step, t):
        if t.is_cuda:
            return real(step, t)
        made.append(Recording(step, t))
        return made[-1]
    monkeypatch.setitem(graph.CAPTURES, "cpu", True)
    monkeypatch.setattr(graph, "capture", capture)
    return made


@contextlib.contextmanager
def eager(monkeypatch, device, fixed):
    """Within it steps are run as they are; fixed: with the shapes of those that are captured."""
    with monkeypatch.context() as m:
        m.setitem(graph.CAPTURES, device, fixed)
        m.setattr(graph, "capture", lambda step, t: step)
        yield


# ---- the recorder --------------------------------------------------------------------------------

@pytest.mark.parametrize("step", (
    lambda x: x.sum().item(), lambda x: x[x > 1], lambda x: x.nonzero(),
    lambda x: x + torch.tensor([1]), lambda x: x.copy_(torch.tensor(3)), lambda x: 1 if x[0] else 2,
    lambda x: x.repeat_interleave(x), lambda x: x.resize_(1)))
def test_the_recorder_refuses_what_a_graph_cannot_hold(step):
    x = torch.tensor([2, 1])
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Recording(step, x)
    assert x.tolist() == [2, 1]


def test_the_recorder_wants_memory_from_outside_to_stay():
    lost, x = [torch.ones(1)], torch.zeros(1)
    recording = Recording(lambda x: x.add_(lost[0]), x)
    recording(x)
    assert x.item() == 1  # nothing when it is made
    lost.clear()
    with pytest.raises(AssertionError, match="freed"):
        recording(x)


# ---- the sampler ---------------------------------------------------------------------------------

ENDS = dict(eos_ids=range(0, 130, 9))
CASES = {  # model, autocast, G, L, options
    "growth": ("llama_gqa", False, 2, 150, {}),  # buffers of 64, 128, 150
    "growth and ends": ("qwen3", False, 6, 150, dict(eos_ids=range(0, 130, 40))),
    "ends": ("llama_gqa", False, 30, 40, ENDS),
    "a rule to stop": ("qwen3", False, 30, 40, dict(stop=sixth_even, temperature=0.7)),
    "greedy": ("qwen2_sharded", False, 4, 40, dict(eos_ids=[30, 62], temperature=0)),
    "top_k": ("llama_gqa", False, 20, 40, dict(top_k=40, **ENDS)),
    "top_p": ("qwen2_tied", False, 20, 40, dict(top_p=0.9, **ENDS)),
    "top_k and top_p": ("qwen3", False, 20, 40, dict(top_k=60, top_p=0.9, stop=sixth_even, **ENDS)),
    "adapter": ("lora", False, 20, 40, ENDS),
    "adapter, bfloat16": ("lora", True, 20, 80, ENDS),
    "bfloat16": ("qwen3", True, 20, 40, dict(top_p=0.9, **ENDS))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_eager_ones(models, name, device, recordings, monkeypatch):
    """To the last bit those with the same shapes; to rounding those on slices that grow. Most steps
    are replayed, what the batch changed is captured anew; rows are drawn in parts."""
    kind, autocast, G, L, options = CASES[name]
    model, noise = models[kind], uniforms(3, G, L, seed=3)
    monkeypatch.setitem(sample_py.DRAW_ELEMENTS, device, 25 * model.config.vocab_size)
    changes, steps = (spied(monkeypatch, GroupCache, of) for of in ("select", "make_room"))

    def run():
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return sample(model.to(device), PROMPTS, G, L, noise=noise, **options)

    try:
        out = run()
        assert graph.CAPTURES[device]  # none has failed
        if device == "cpu":
            n, replays = len(recordings), sum(recording.replays for recording in recordings)
            # the first buffers, larger ones, smaller batches (but for one after the last token)
            shapes = 1 + sum(grown for _, grown in steps) + len(changes)
            assert n > 1 and shapes - n in (0, 1)
            assert replays == len(steps) - n > 2 * n  # each shape runs once eagerly
        with eager(monkeypatch, device, fixed=True):
            fixed = run()
        assert all(torch.equal(x, getattr(fixed, field)) for field, x in vars(out).items())
        with eager(monkeypatch, device, fixed=False):
            slices = run()
        if not autocast:
            same(out, slices)
    finally:
        model.to("cpu")


def test_between_two_looks_the_host_launches_a_graph_and_nothing_else(models, recordings):
    def count(L):
        with Count() as counted:
            sample(models["lora"], PROMPTS, 4, L, noise=uniforms(3, 4, L))
        return counted.counts

    few, more = count(13), count(14)  # both look at tokens 3, 7, 11 and the last
    assert few == more and more["launches"] > 100 and recordings[-1].replays == 12


def test_a_capture_that_fails_is_told_once(models, recordings, monkeypatch, capsys):
    """In the middle of a step, which leaves no trace; what was to come is right, and the next
    rollout does not try again."""
    arguments = models["llama_gqa"], PROMPTS, 4, 70
    monkeypatch.setattr(sys.modules[__name__], "FORBIDDEN", {"searchsorted"})
    outs = [sample(*arguments, noise=uniforms(3, 4, 70)) for _ in range(2)]
    assert capsys.readouterr().err == ("no CUDA graph, this goes on with single launches: "
                                       "searchsorted: not permitted when stream is capturing\n")
    assert not recordings and not graph.CAPTURES["cpu"] and graph.CAPTURES["cuda"]
    for out in outs:
        same(out, sample(*arguments, noise=uniforms(3, 4, 70)))


@pytest.mark.parametrize("fails", (False, True))
def test_what_a_capture_asks_of_torch(monkeypatch, capsys, fails):
    """Of stand-ins. The stream that was there comes back, also when the capture fails at its end,
    whose own message says less than the first one."""
    events, t = [], torch.zeros(1)

    @contextlib.contextmanager
    def context(name, *arguments, **options):
        events.append((name, *arguments, options))
        try:
            yield
        finally:
            events.append("end of " + name)
            if fails and name == "graph":
                raise RuntimeError("invalidated")

    def step(t):
        events.append("step")
        if fails and events.count("step") == 2:
            raise RuntimeError("no\nsuch thing")

    made = SimpleNamespace(replay=lambda: events.append("replay"))
    monkeypatch.setattr(graph, "side_stream", lambda device: f"side of {device}")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "stream", functools.partial(context, "stream"))
    monkeypatch.setattr(torch.cuda, "graph", functools.partial(context, "graph"))
    monkeypatch.setitem(graph.CAPTURES, "cpu", True)
    steps = graph.repeat(step, t)
    for _ in range(3):
        next(steps)
    begin = [("stream", "side of cpu", {}), (
        "graph", made, dict(stream="side of cpu", capture_error_mode="thread_local"))]
    assert events == ["step", *begin, "step", "end of graph", "end of stream",
                      *["step" if fails else "replay"] * 2]
    assert capsys.readouterr().err.endswith("launches: no\n" if fails else "")
