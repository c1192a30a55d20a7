"""
A step that is done again and again; on a GPU as a CUDA graph, one launch in place of thousands.

The step is a program of the device alone. It works in place on tensors that stay where they are,
asks for no value, sends none, and takes what differs from one call to the next from a tensor, too.
"""
import functools
import sys

import torch

# a device whose capture has failed is not asked again: torch's allocator may be in a strange state
CAPTURES = {"cpu": False, "cuda": True}
side_stream = functools.cache(torch.cuda.Stream)  # of a device: nothing is captured on its main one


def repeat(step, t):
    """Calls step(t), t a tensor on the device, at each next(). First eagerly, which makes what is
    made at first use (compiled kernels, buffers of libraries); then it is captured and replayed."""
    step(t)
    yield
    if CAPTURES[t.device.type]:
        try:
            step = capture(step, t)
        except RuntimeError as e:
            CAPTURES[t.device.type] = False
            # what ends a capture only says that something failed before
            why = (str(e.__context__ or e) or repr(e)).splitlines()[0]
            print(f"no CUDA graph, this goes on with single launches: {why}", file=sys.stderr,
                  flush=True)
    while True:
        step(t)
        yield


def capture(step, t):
    """Records what step(t) launches, without doing it. Returns a function that does it."""
    graph, stream = torch.cuda.CUDAGraph(), side_stream(t.device)
    with torch.cuda.stream(stream):  # after a failure, too, the stream comes back that was there
        # thread_local: other threads, such as NCCL's, may ask their own questions meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step(t)
    return lambda t: graph.replay()
