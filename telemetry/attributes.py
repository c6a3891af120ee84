"""Every span name and attribute we write, in one place: gen_ai.* names still move upstream."""

from typing import Final

# Spans, in the order in which a request meets them.
SPAN_HTTP_REQUEST: Final = "relevo.http_request"
SPAN_GRPC_REQUEST: Final = "relevo.grpc_request"
SPAN_QUEUE: Final = "relevo.queue"
SPAN_ROUTE: Final = "relevo.route"
SPAN_ATTEMPT: Final = "relevo.attempt"
SPAN_PREFILL_WAIT: Final = "relevo.prefill_wait"
SPAN_PREFILL: Final = "relevo.prefill"
SPAN_KV_SEND: Final = "relevo.kv_send"
SPAN_KV_RECEIVE: Final = "relevo.kv_receive"
SPAN_TRANSFER_TAIL: Final = "relevo.transfer_tail"
SPAN_SLOT_WAIT: Final = "relevo.slot_wait"
SPAN_DECODE: Final = "relevo.decode"

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
ERROR_TYPE: Final = "error.type"

PROVIDER: Final = "relevo"
OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"

# Ours.
RELEVO_REQUEST_ID: Final = "relevo.request.id"
RELEVO_REQUEST_LABEL: Final = "relevo.request.label"
RELEVO_EPOCH: Final = "relevo.epoch"
RELEVO_PREFILL_WORKER: Final = "relevo.prefill.worker"
RELEVO_DECODE_WORKER: Final = "relevo.decode.worker"
RELEVO_TRANSFER_ID: Final = "relevo.kv.transfer_id"
RELEVO_KV_BYTES: Final = "relevo.kv.bytes"
RELEVO_KV_TOKENS: Final = "relevo.kv.tokens"
RELEVO_NUM_CACHED_TOKENS: Final = "relevo.num_cached_tokens"
RELEVO_NUM_COMPUTED_TOKENS: Final = "relevo.num_computed_tokens"
# Prefixes: one attribute per term of the chosen and the next best route, and per time part.
RELEVO_COST_PREFIX: Final = "relevo.cost."
RELEVO_COST_NEXT_BEST_PREFIX: Final = "relevo.cost.next_best."
