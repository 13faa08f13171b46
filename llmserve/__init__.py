"""llmserve: disaggregated serving of Qwen3 mixture-of-experts models.

`Engine` is the embedded engine, `SamplingParams` says how it samples. Both load on first use, so that the HTTP server
and the tools start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmserve.embedded import Engine, RequestOutput
    from llmserve.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "Engine": "llmserve.embedded",
    "RequestOutput": "llmserve.embedded",
    "SamplingParams": "llmserve.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'llmserve' has no attribute {name!r}")
