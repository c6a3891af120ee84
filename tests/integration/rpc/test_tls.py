"""Mutual TLS between workers, with certificates made on the spot."""

import grpc
from relevo.v1 import decode_pb2

from rpc.config import RpcConfig
from tests.certificates import make_certificate


async def test_only_holders_of_a_certificate_get_through(serve, tmp_path):
    ours = make_certificate(tmp_path / "ours", "relevo-worker")
    served = await serve(config=RpcConfig(tls=ours))
    await served.decode_stub.SetPeers(decode_pb2.SetPeersRequest())

    ca = (tmp_path / "ours" / "cert.pem").read_bytes()
    options = [("grpc.ssl_target_name_override", "relevo-worker")]
    no_certificate = grpc.ssl_channel_credentials(root_certificates=ca)
    for channel in (
        grpc.aio.insecure_channel(served.address),
        grpc.aio.secure_channel(served.address, no_certificate, options=options),
    ):
        call = channel.unary_unary("/relevo.v1.DecodeService/SetPeers")(b"")
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
