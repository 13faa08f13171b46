"""What every endpoint needs: the pipeline, the backend, the options and the metrics of this server."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from starlette.requests import Request

from llmserve.config import ServerConfig
from llmserve.control.backend import Backend
from llmserve.control.messages import ModelInfo
from llmserve.errors import NotFoundError, UnavailableError
from llmserve.pipeline import TextPipeline
from llmserve.server.metrics import ServerMetrics


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields that every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(slots=True)
class ServerContext:
    pipeline: TextPipeline
    backend: Backend
    config: ServerConfig
    metrics: ServerMetrics = field(init=False)
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.backend, self.model_label)

    @classmethod
    def of(cls, request: Request) -> ServerContext:
        return request.app.state.context

    def model(self) -> ModelInfo:
        """Raises UnavailableError until the first worker has registered."""
        model = self.backend.model
        if model is None:
            raise UnavailableError("no worker has registered yet; try again when /ready answers 200")
        return model

    def served_name(self) -> str:
        return self.config.served_model_name or self.model().name

    def model_label(self) -> str:
        """The served name for metrics, known or not."""
        model = self.backend.model
        return self.config.served_model_name or (model.name if model else "")

    def check_model(self, name: str) -> ModelInfo:
        """Raises NotFoundError unless `name` is the served one."""
        if name != self.served_name():
            raise NotFoundError(
                f"the model {name[:100]!r} does not exist; this server serves {self.served_name()!r}",
                param="model",
                code="model_not_found",
            )
        return self.model()

    def identity(self, prefix: str) -> Identity:
        return Identity(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.served_name(),
            system_fingerprint=f"fp_{self.model().fingerprint[:12]}",
        )
