"""The middle of the ingress: both faces turn their requests into the calls of this class."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from api.caller import Caller
from api.config import IngressConfig, ModelConfig
from api.echo import Echo
from api.errors import ApiError, Verdict, invalid
from api.generation_request import GenerationRequest, Limits
from api.operations.request_log import RequestLog
from api.text_stream import TextStream
from api.tokenizer import Tokenizer
from api.transcript import MAX_PROMPT_TOKENS, Transcript
from api.upstream import Upstream
from grammar.checker import CheckerBusyError, GrammarChecker
from grammar.grammar import GrammarError
from router.errors import NoWorkers
from router.request import ModelInfo, RoutedRequest
from telemetry import tracing

NOT_READY_RETRY_AFTER_S = 2.0

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """An open stream and whose it is."""

    stream: TextStream
    caller: Caller


class Serving:
    """Owns the running requests of this ingress: each from its start until its stream is closed."""

    def __init__(  # noqa: PLR0913 - what both faces stand on
        self,
        config: IngressConfig,
        model_config: ModelConfig,
        *,
        tokenizer: Tokenizer,
        upstream: Upstream,
        request_log: RequestLog | None = None,
        captures_content: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.upstream = upstream
        self.now = now
        self._request_log = request_log or RequestLog()
        self._captures_content = captures_content
        self.config_digest = ""  # of the cluster's whole configuration
        self.is_leaving = False  # clients shall turn to other ingresses, and are served until then
        self.is_draining = False
        self._idle = asyncio.Event()
        self._running: dict[str, _Running] = {}
        self._grammar_checker = GrammarChecker(model_config.path)

    @property
    def num_running(self) -> int:
        """Requests whose stream is open."""
        return len(self._running)

    def is_ready(self) -> bool:
        """Tell whether a request sent now would be served."""
        return not self.is_leaving and self.upstream.is_ready()

    def model_info(self) -> ModelInfo:
        """Return the model as the workers announce it; NoWorkers before the first did."""
        info = self.upstream.model
        if info is None:
            raise NoWorkers("No worker is ready yet", NOT_READY_RETRY_AFTER_S)
        return info

    def limits(self) -> Limits:
        """Return what the model allows."""
        info = self.model_info()
        return Limits(
            max_model_len=info.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            encode_word=self.tokenizer.encode_word,
            max_num_seqs=info.max_num_seqs,
            eos_token_ids=info.eos_token_ids,
        )

    def lay_out_echo(self, request: GenerationRequest, text: str | None) -> GenerationRequest:
        """Give a request that wants an echo its prompt's text; None: its tokens say it."""
        if not request.has_echo:
            return request
        echo = Echo.of(request.token_ids, text, self.tokenizer.new_detokenizer())
        return replace(request, echo=echo)

    async def check_grammar(self, request: GenerationRequest) -> None:
        """Judge what the text shall match, before any worker sees it."""
        wanted = request.structured_output
        if wanted is None:
            return
        try:
            await self._grammar_checker.check(wanted.grammar)
        except GrammarError as error:
            raise invalid(f"{wanted.field} cannot be enforced: {error}", wanted.field) from error
        except CheckerBusyError as error:
            raise ApiError(
                Verdict.QUEUE_FULL,
                "Too many new grammars at once; try again later",
                param=wanted.field,
                retry_after_s=error.retry_after_s,
            ) from error

    def has_room(self, caller: Caller, priority: int = 0) -> bool:
        """Tell whether a request of this caller need not be refused for the load."""
        # The end of the ingress has words of its own.
        return self.is_draining or self.upstream.has_room(caller.tenant, priority)

    def check_room(self, caller: Caller, priority: int = 0) -> None:
        """QueueFull when it could only be refused later, after work that others wait for."""
        if not self.is_draining:
            self.upstream.check_room(caller.tenant, priority)

    def open_stream(
        self,
        request: GenerationRequest,
        *,
        request_label: str,
        arrived_at: float,
        caller: Caller,
        timeout_s: float | None = None,
    ) -> TextStream:
        """Start a request; the caller must exhaust or close the stream."""
        if self.is_draining:
            raise NoWorkers("The server is shutting down", NOT_READY_RETRY_AFTER_S)
        limit_s = self.config.request_timeout_s
        request_id = uuid.uuid4().hex
        caller.allowance.charge(len(request.token_ids))
        routed = RoutedRequest(
            request_id=request_id,
            token_ids=request.token_ids,
            sampling=request.to_sampling_params(),
            cache_salt=self._cache_salt(request, caller),
            request_label=request_label,
            tenant=caller.tenant,
            priority=request.priority,
            session_key=caller.session_key(request.prompt_cache_key),
            num_choices=request.num_choices,
            timeout_s=limit_s if timeout_s is None else min(timeout_s, limit_s),
            arrived_at=arrived_at,
            trace_context=tracing.current_context(),
        )
        generation = self.upstream.generate(routed)
        stream = TextStream(
            request,
            request_id=request_id,
            request_label=request_label,
            generation=generation,
            new_detokenizer=partial(
                self.tokenizer.new_detokenizer, is_parsed=request.reading is not None
            ),
            on_close=lambda: self._forget(routed),
        )
        stream.transcript = self._new_transcript(request)
        self._running[request_id] = _Running(stream=stream, caller=caller)
        return stream

    def abort(self, request_id: str, *, caller: Caller) -> bool:
        """End a request of this tenant by the id the server gave it; False when there is none."""
        running = self._running.get(request_id)
        if running is None or running.caller.tenant.name != caller.tenant.name:
            return False
        running.stream.abort(Verdict.CANCELLED, "The request was aborted")
        return True

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; let the running ones end, and end those that take too long."""
        self.is_leaving = self.is_draining = True
        self._wake_when_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            _LOGGER.warning("%d requests end with the ingress", len(self._running))
            for running in list(self._running.values()):
                running.stream.abort(Verdict.UNAVAILABLE, "The server is shutting down")

    async def close(self) -> None:
        """End what belongs to no request; after `drain`."""
        await self._grammar_checker.close()
        self._request_log.close()

    def _new_transcript(self, request: GenerationRequest) -> Transcript | None:
        if not self._captures_content:
            return None
        shown = () if request.messages else request.token_ids[:MAX_PROMPT_TOKENS]
        return Transcript(request, prompt=self.tokenizer.detokenize(shown))

    def _cache_salt(self, request: GenerationRequest, caller: Caller) -> str:
        is_own = self.config.tenant_cache_salt
        return caller.cache_salt(request.cache_salt) if is_own else request.cache_salt

    def _wake_when_idle(self) -> None:
        if self.is_draining and not self._running:
            self._idle.set()

    def _forget(self, request: RoutedRequest) -> None:
        running = self._running.pop(request.request_id, None)
        if running is not None:
            running.caller.allowance.charge(running.stream.num_tokens)
            self._request_log.write(request, running.stream)
        self._wake_when_idle()
