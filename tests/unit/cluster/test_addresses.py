"""The line to paste is one that the model can answer."""

import json
from pathlib import Path

import pytest

from cluster import addresses
from cluster.config import ClusterConfig

CHATS, COMPLETES = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("files", "path"),
    [
        ({"chat_template.jinja": "{{ messages }}"}, CHATS),
        ({"tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"})}, CHATS),
        ({"tokenizer_config.json": json.dumps({"eos_token": "</s>"})}, COMPLETES),
        ({"tokenizer_config.json": "not JSON"}, COMPLETES),
        ({}, COMPLETES),
    ],
)
def test_a_model_is_asked_what_it_can_answer(files: dict[str, str], path: str, tmp_path: Path):
    whole = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}
    for name, content in (whole | files).items():
        (tmp_path / name).write_text(content)
    line = addresses.curl(ClusterConfig.model_validate({"model": {"path": str(tmp_path)}}))
    assert f"{path} " in line


def test_a_model_of_other_machines_is_asked_to_chat():
    line = addresses.curl(ClusterConfig.model_validate({"model": {"path": "owner/model"}}))
    assert f"{CHATS} " in line
