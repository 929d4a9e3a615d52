"""The access log: one JSON line on stdout for each request that has ended."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from compiled_attn.serve.call import Call

__all__ = ["access_line"]


def access_line(call: Call) -> str:
    """The line of a request; tokens and times to first tokens only where tokens were generated.

    ``ttft_s`` is the time to the first token of the first answer, ``seconds`` the time to the end
    of the connection's part of it.
    """
    results = call.results()
    line: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": call.response_id or call.request_id,
        "request_id": call.request_id,
        "client": call.client,
        "method": call.method,
        "path": call.path,
        "status": call.status,
        "seconds": round(time.perf_counter() - call.started_s, 4),
    }
    if results:
        line |= {
            "prompt_tokens": sum(len(each.prompt) for each in results if not each.choice),
            "cached_tokens": sum(each.cached_tokens for each in results),
            "tokens": sum(len(each.tokens) for each in results),
            "ttft_s": round(min(each.ttft_s for each in results), 4),
        }
    return json.dumps(line)
