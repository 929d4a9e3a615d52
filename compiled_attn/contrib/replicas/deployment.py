"""Deploys replicas on Ray Serve."""

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

__all__ = ["MAX_REQUESTS", "deploy"]

MAX_REQUESTS = 4096  # per replica; its engine has its own queue
_DELETE_TIMEOUT_S = 20.0


@contextmanager
def deploy(
    replica: type, arguments: Sequence[Any], count: int, *, cpus: int, gpus: int
) -> Iterator[DeploymentHandle]:
    """Run a Serve application of ``count`` replicas until the context exits.

    Its name is unique on the cluster. Serve's proxies are not started: they choose a replica before
    they have read the prompt. ``arguments`` of the constructor are pickled; each replica reserves
    ``cpus`` and ``gpus``.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _start_serve()
    replicas = serve.deployment(
        replica,
        num_replicas=count,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=MAX_REQUESTS,
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
        _delete(application)


def _start_serve() -> None:
    try:
        serve.start(proxy_location="Disabled")
    except ValueError:  # another frontend started it concurrently
        serve.start(proxy_location="Disabled")


def _delete(application: str) -> None:
    """Delete the application; a cluster that is gone never answers, hence the timeout."""

    def delete() -> None:
        with suppress(RayError, TimeoutError):
            serve.delete(application)

    thread = threading.Thread(target=delete, daemon=True)
    thread.start()
    thread.join(_DELETE_TIMEOUT_S)
