"""Every span name and attribute we write, in one place: gen_ai.* names still move upstream."""

from typing import Final

# Spans, in the order in which a request meets them; a dot leads to a part of the span before it.
SPAN_REQUEST: Final = "request"
SPAN_QUEUE: Final = "queue"
SPAN_ROUTE: Final = "route"
SPAN_ATTEMPT: Final = "attempt"
SPAN_PREFILL: Final = "prefill"
SPAN_PREFILL_QUEUE: Final = "prefill.queue"
SPAN_PREFILL_CHUNK: Final = "prefill.chunk"
SPAN_KV_SEND: Final = "kv.send"
SPAN_KV_RECEIVE: Final = "kv.recv"
SPAN_KV_RANGE: Final = "kv.range"
SPAN_KV_TAIL: Final = "kv.tail"
SPAN_DECODE: Final = "decode"
SPAN_SLOT_WAIT: Final = "decode.slot_wait"
SPAN_FIRST_STEP: Final = "decode.first_step"

# Events on the request, but preempted, which is one of the worker's span.
EVENT_FIRST_TOKEN: Final = "first_token"
EVENT_MIGRATED: Final = "migrated"
EVENT_PREEMPTED: Final = "preempted"

# OpenTelemetry semantic conventions for generative AI (state of 2026-11, "development").
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"  # JSON; only with capture_content
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
ERROR_TYPE: Final = "error.type"

PROVIDER: Final = "relevo"
OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"

# Ours.
RELEVO_REQUEST_ID: Final = "relevo.request.id"
RELEVO_REQUEST_LABEL: Final = "relevo.request.label"
RELEVO_TENANT: Final = "relevo.tenant"
RELEVO_EPOCH: Final = "relevo.epoch"
RELEVO_PREFILL_WORKER: Final = "relevo.prefill.worker"
RELEVO_DECODE_WORKER: Final = "relevo.decode.worker"
RELEVO_TRANSFER_ID: Final = "relevo.kv.transfer_id"
RELEVO_KV_BYTES: Final = "relevo.kv.bytes"
RELEVO_KV_TOKENS: Final = "relevo.kv.tokens"
RELEVO_KV_BLOCKS: Final = "relevo.kv.blocks"
RELEVO_KV_BACKEND: Final = "relevo.kv.backend"
RELEVO_KV_TICKET_WAIT_S: Final = "relevo.kv.ticket_wait_s"
RELEVO_KV_TOKEN_START: Final = "relevo.kv.token_start"
RELEVO_KV_TOKEN_END: Final = "relevo.kv.token_end"
RELEVO_NUM_CACHED_TOKENS: Final = "relevo.num_cached_tokens"
RELEVO_NUM_COMPUTED_TOKENS: Final = "relevo.num_computed_tokens"
RELEVO_NUM_PREEMPTIONS: Final = "relevo.num_preemptions"
RELEVO_NUM_MIGRATIONS: Final = "relevo.num_migrations"
RELEVO_CAUSE: Final = "relevo.cause"
RELEVO_FAILED_WORKERS: Final = "relevo.failed_workers"
RELEVO_CONTENT_IS_CUT: Final = "relevo.content.is_cut"  # of the messages, for their length
RELEVO_SECOND_TOKEN_S: Final = "relevo.second_token_s"  # since arrival
# Prefixes: one attribute per term of the chosen and the next best route, and per time part.
RELEVO_COST_PREFIX: Final = "relevo.cost."
RELEVO_NEXT_BEST_PREFIX: Final = "relevo.next_best."
RELEVO_NEXT_BEST_COST_PREFIX: Final = "relevo.next_best.cost."
RELEVO_FIRST_TOKEN_PREFIX: Final = "relevo.first_token."
RELEVO_SECOND_TOKEN_PREFIX: Final = "relevo.second_token."
