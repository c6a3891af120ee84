"""The watch over unpicklers sees what it is for."""

import pickle

from rpc.config import RpcConfig
from tests.integration.conftest import REPOSITORY, unpickled


def test_an_unpickler_under_our_modules_is_seen_and_another_is_not() -> None:
    data = pickle.dumps(RpcConfig())
    pickle.loads(data)  # noqa: S301
    assert unpickled == []
    code = compile("pickle.loads(data)", str(REPOSITORY / "rpc" / "wire.py"), "exec")
    exec(code, {"pickle": pickle, "data": data})
    assert len(unpickled) == 1
    assert "rpc/wire.py" in unpickled[0]
    unpickled.clear()
