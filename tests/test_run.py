"""lib/run.py: one message for a mistake, the output folder, processes, signals."""
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from conftest import OUT, ROOT, refused
from lib.run import (Output, Processes, Signals, command, compile_where_it_pays, forward_dtype)


def raises(error):
    def main(argv):
        raise error
    return main


@pytest.mark.parametrize("error, says", [
    (ValueError("a.toml: bad"), "error: a.toml: bad\n"), (OSError("b: gone"), "error: b: gone\n"),
    (torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nand more"),
     "error: out of memory: Tried to allocate 2.00 GiB.\nLower"), (MemoryError(), "micro_tokens"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
    (dist.DistBackendError("NCCL error"), "another process ended"),
    (RuntimeError("[gloo/transport] Connection closed by peer"), "another process ended")])
def test_a_mistake_or_a_fault_is_one_message_and_code_2(capsys, error, says):
    assert command(raises(error), []) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and says in text and "and more" not in text


def test_a_reader_that_has_enough_is_no_fault():
    """`train.py --help | head -1` ended with "Exception ignored ... BrokenPipeError", more text with
    "error: [Errno 32] Broken pipe"."""
    for size in (10, 10**6):  # within Python's buffer, and more
        words = f"from lib.run import *; end(command(lambda argv: print('x' * {size})))"
        process = subprocess.Popen([sys.executable, "-c", words], cwd=ROOT, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 128 + signal.SIGPIPE


def test_our_own_mistakes_show_a_traceback():
    for error in (RuntimeError("shapes"), KeyError("x"), TypeError("y")):
        with pytest.raises(type(error)):
            command(raises(error), [])
    for error, code in ((KeyboardInterrupt(), 130), (SystemExit(143), 143), (SystemExit(), 0)):
        assert command(raises(error), []) == code
    assert command(lambda argv: None, []) == 0 and command(lambda argv: len(argv), ["a"]) == 1


@pytest.mark.parametrize("processes, cleaned_up", [("1", True), ("2", False)])
def test_one_of_several_processes_ends_without_pythons_clean_up(processes, cleaned_up):
    """A thread of gloo let go of a tensor while Python cleaned up: one run in 12 on four processes
    ended with SIGABRT after all was done, and torchrun called it failed."""
    code = ("import atexit; from lib.run import command, end; atexit.register(print, 'cleaned up');"
            "print('done', end=' '); end(command(lambda argv: 3, []))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "WORLD_SIZE": processes})
    assert done.returncode == 3 and not done.stderr
    assert done.stdout == "done " + cleaned_up * "cleaned up\n"


def test_compilation_is_chosen_where_it_pays(monkeypatch):
    """auto: on a GPU with all that it needs, for a model that is worth the wait. Regression: yes
    without a compiler ended in a traceback of Inductor's."""
    found = dict.fromkeys(("gcc", "clang++", "triton"), "there")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", found.get)
    monkeypatch.setattr("importlib.util.find_spec", found.get)

    def compiles(device, million, choice="auto"):
        done, said = [], []
        compile_where_it_pays(SimpleNamespace(
            head_weight=SimpleNamespace(device=torch.device(device)),
            parameters=lambda: [torch.empty(1000 * million, 1000, device="meta")],
            compile_layers=lambda: done.append(1)), choice, said.append)
        assert len(said) == len(done) or "not compiled: torch.compile needs Triton and" in said[0]
        return bool(done)
    assert compiles("cuda", 200) and not compiles("cpu", 200) and not compiles("cuda", 1)
    assert compiles("cpu", 1, "yes") and not compiles("cuda", 200, "no")
    for missing, device in (("gcc", "cuda"), ("triton", "cuda"), ("clang++", "cpu")):
        monkeypatch.delitem(found, missing)
        assert not compiles(device, 200)
        with pytest.raises(ValueError, match="torch.compile needs .* here; without: --compile=no"):
            compiles(device, 200, "yes")
        monkeypatch.setitem(found, missing, "there")
    monkeypatch.setenv("CXX", "mine")
    with pytest.raises(ValueError, match="needs a compiler, mine, here"):
        compiles("cpu", 1, "yes")


def test_rows_are_cut_back_to_the_checkpoint(tmp_path):
    """A killed run has rows behind its checkpoint, the last one torn; null stands for nan. What
    else is no row is not dropped without a word."""
    output, path = Output(str(tmp_path)), tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    output.open_log(2)
    output.log({"step": 2, "loss": float("nan")})
    output.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2, "loss": null}\n'
    path.write_text('{"step": 0}\n[1]\n{"step": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2: not a JSON object with step; mend or"):
        output.open_log(2)
    for broken in ('{"step": "x"}', '{"step": null}', "[" * 100_000):  # regression: tracebacks
        path.write_text('{"step": 0}\n' + broken + "\n")
        with pytest.raises(ValueError, match="metrics.jsonl:2: .*mend or remove"):
            output.open_log(2)
    path.write_text('{"step": 0}\n{"step": 1}')  # an editor took the end of the line
    assert output.rows() == [{"step": 0}, {"step": 1}]


def test_only_the_main_process_writes(tmp_path):
    output = Output(str(tmp_path / "out"), main=False)
    output.lock()
    output.write("config.toml", "x")
    output.open_log(0)
    output.log({"step": 0})
    output.save({})
    output.clear()
    output.close()
    assert not os.listdir(tmp_path)


def test_a_second_run_in_the_folder_is_refused_while_the_first_one_lives(small, tmp_path):
    first = Output(str(tmp_path / OUT))
    first.lock()
    for more in ([], ["--resume"], ["--overwrite"]):
        refused(tmp_path, [*small, *more], f"another run is writing to {OUT}", "--out=FOLDER")
    first.close()
    Output(str(tmp_path / OUT)).lock()


def test_a_file_system_without_locks_gets_a_note(tmp_path, monkeypatch, capsys):
    """Regression: the note itself failed, on the file systems that several nodes share."""
    def flock(*_):
        raise OSError("no locks here")
    monkeypatch.setattr(fcntl, "flock", flock)
    Output(str(tmp_path / "out")).lock()
    assert "cannot be locked (no locks here)" in capsys.readouterr().err


def test_signals_are_handled_as_before_once_a_run_is_over():
    """One that nohup lets the process ignore stays ignored."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    assert [signal.getsignal(number) for number in numbers] == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals() as signals:
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, before[2])


def test_processes_without_a_gpu_of_their_own_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 .* no GPU: PyTorch sees 2; use --device=cpu"):
        Processes("auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="PyTorch sees 0; use --device=cpu"):
        Processes("cuda")


def test_auto_is_float32_on_every_cpu_and_where_bfloat16_is_emulated(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert forward_dtype("auto", cpu) == torch.float32
    assert forward_dtype("bfloat16", cpu) == torch.bfloat16
    for native in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                            lambda including_emulation=True: including_emulation or native)
        expected = torch.bfloat16 if native else torch.float32
        assert forward_dtype("auto", gpu) == expected


def test_imports_leave_the_environment_alone():
    """Importing our modules must not choose devices for the user."""
    code = ("import os, sys, torch; sys.path.insert(0, %r)\n"
            "before, state = dict(os.environ), torch.get_rng_state()\n"
            "import model, tokenizer, data, rewards, gtpo, logprobs, sample, eval, train\n"
            "assert dict(os.environ) == before and torch.equal(state, torch.get_rng_state())")
    subprocess.run([sys.executable, "-c", code % ROOT], check=True,
                   env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
