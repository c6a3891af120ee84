"""An empty replica on a running Ray cluster: what Serve itself costs a process that does nothing.

    python -m bench.empty_replica ADDRESS      says its process id, and ends with its stdin

Its user code is as small as can be; whoever joins needs Ray's token in the environment.
"""

import json
import logging
import os
import sys

import ray
from ray import serve

APPLICATION = "empty"


@serve.deployment(ray_actor_options={"num_cpus": 0}, health_check_period_s=2)
class Empty:
    """Answers who it is, and nothing else."""

    def describe(self) -> int:
        """Its process id."""
        return os.getpid()


def main() -> None:
    """Deploy it, say where it runs, and take it back when nobody listens any more."""
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    application = Empty.bind()  # type: ignore[attr-defined]  # the decorator makes a deployment of it
    handle = serve.run(application, name=APPLICATION, route_prefix=None)
    pid = handle.describe.remote().result(timeout_s=60)
    sys.stdout.write(json.dumps({"pid": pid}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    serve.delete(APPLICATION)


if __name__ == "__main__":
    main()
