"""What docs/grpc.md shows does what it says."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from relevo.v1 import inference_pb2

from tests.integration.api.conftest import ANSWER, Site

DOCS = Path(__file__).parents[3]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


async def test_the_python_example_runs(site: Site) -> None:
    (code,) = blocks("docs/grpc.md", "python")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs/grpc.md", "exec"), names)
    names |= {"TARGET": f"127.0.0.1:{site.ingress.grpc_port}", "MODEL": "tiny"}
    assert await names["main"]() == ANSWER


async def test_the_grpcurl_lines_are_calls_the_server_takes(site: Site) -> None:
    """What grpcurl does with them: find the method by reflection, fill its request from JSON."""
    lines = [
        line
        for page in ("docs/grpc.md", "README.md")
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("grpcurl")
    ]
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        target, method = words[-2:]
        assert target == "127.0.0.1:9000"
        service, _, name = method.partition("/")
        stub = reflection_pb2_grpc.ServerReflectionStub(site.channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
        answer = await stub.ServerReflectionInfo(iter([request])).read()
        assert answer.file_descriptor_response.file_descriptor_proto
        descriptor = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
        kind = getattr(inference_pb2, descriptor.methods_by_name[name].input_type.name)
        data = json.loads(words[words.index("-d") + 1].replace("smollm2-135m-instruct", "tiny"))
        call = getattr(site.stub, name)(json_format.ParseDict(data, kind()))
        messages = [message async for message in call]
        assert messages[-1].HasField("usage")
