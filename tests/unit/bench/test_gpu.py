"""The figures of a GPU, in small and on a CPU, so that they can be had where there is one."""

import re
from pathlib import Path

import pytest
import torch

from bench import gpu
from tests.tiny_model import make_tiny_model


def test_every_line_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = make_tiny_model(tmp_path / "tiny")
    gpu.main(["--model", str(model), "--dry", "--variants", "as it serves", "gathered"])
    first, *lines = capsys.readouterr().out.strip().splitlines()
    assert re.search(r"copy [\d.]+ GB/s, product [\d.]+ TFLOP/s", first)
    for name in ("as it serves", "gathered"):
        own = [line for line in lines if line.startswith(name)]
        assert [" ".join(line.split(name)[1].split()[:3]) for line in own] == [
            "decode of 1:",
            "decode of 2:",
            "prompt of 40:",
        ]
        assert all(re.search(r"[1-9].* % of a (copy|product)", line) for line in own)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]):
    gpu.main([])
    assert "skipped: no CUDA device" in capsys.readouterr().out
