"""The deployment: what Ray Serve is told of the replicas that it is to keep."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from compiled_attn.contrib.replicas.by_prefix import ByPrefix

__all__ = ["AT_ONCE", "deployed"]

AT_ONCE = 4096  # requests of one replica; its engine has a queue of its own
_PATIENCE = 20.0  # seconds


@contextmanager
def deployed(
    replica: type, arguments: Sequence[Any], count: int, *, cpus: int, gpus: int
) -> Iterator[DeploymentHandle]:
    """An application of Serve whose only deployment are the replicas; it ends with the block.

    Its name is its own, so that several may be on one cluster. None of Serve's proxies is started:
    they choose a replica before they have read a prompt.

    Args:
        replica: the class, see `Replica`.
        arguments: of its constructor, pickled.
        count: of replicas.
        cpus, gpus: that a replica reserves.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _join()
    replicas = serve.deployment(
        replica,
        num_replicas=count,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=AT_ONCE,
        request_router_config=RequestRouterConfig(request_router_class=ByPrefix),
        health_check_period_s=1,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
    )
    application = f"compiled-attn-{uuid4().hex[:8]}"
    target = serve.RunTarget(replicas.bind(*arguments), application, route_prefix=None)
    try:
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        yield handle
    finally:
        _end(application)


def _join() -> None:
    """Starts Serve where none is."""
    try:
        serve.start(proxy_location="Disabled")
    except ValueError:  # another front has started it in between
        serve.start(proxy_location="Disabled")


def _end(application: str) -> None:
    """Ends it, unless its cluster has gone, which never answers."""

    def end() -> None:
        with suppress(RayError, TimeoutError):
            serve.delete(application)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(_PATIENCE)
