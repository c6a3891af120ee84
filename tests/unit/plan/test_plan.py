"""Speeds, splits and costs, beside numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from plan.attention import layer_windows
from plan.memory import plan_memory
from plan.parameters import count_parameters
from plan.speed import Speed, plan_speed
from plan.split import Work, plan_costs, plan_split
from sim.cluster import ClusterSpec
from sim.devices import DEVICES
from sim.experiment import find_saturation
from sim.trace import Trace, TraceRequest
from tests.unit.plan.configs import LLAMA_8B, QWEN3_30B, engine_config, model_config, plan
from tests.unit.sim.worlds import hardware

H100 = DEVICES["h100"]
FLOPS, BYTES_PER_S = 989e12 * 0.5, 3.35e12 * 0.7


def speed(values: dict[str, Any] = LLAMA_8B, **changes: Any) -> Speed:
    config, engine = model_config(values, **changes), engine_config()
    parameters = count_parameters(config)
    memory = plan_memory(config, parameters, engine, H100)
    return plan_speed(config, parameters, engine, H100, memory, measured={})


def test_a_decode_step_reads_all_weights_but_the_table_and_the_kv() -> None:
    table = 128_256 * 4096
    read_bytes = 2 * (8_030_261_248 - table) + 3 * 1000 * 131_072
    step_s = speed().decode_step_s(3, 1000) - H100.fixed_s
    head_s = 3 * (2 * table / FLOPS + 20e-6)
    assert step_s == pytest.approx(read_bytes / BYTES_PER_S + head_s)


def test_a_prompt_is_computed_in_chunks() -> None:
    flops = 4096 * 2 * (8_030_261_248 - 2 * 128_256 * 4096) + 4 * 32 * 4096 * 4096 * 4097 / 2
    # Norms are no matrices.
    assert speed().prefill_s(4096) == pytest.approx(2 * H100.fixed_s + flops / FLOPS, rel=1e-3)


def test_a_small_batch_reads_few_experts() -> None:
    moe = speed(QWEN3_30B)
    experts = 48 * 128 * 3 * 2048 * 768
    whole_s = 2 * experts / BYTES_PER_S
    few_s, many_s = moe.decode_step_s(1, 1), moe.decode_step_s(1000, 1)
    assert few_s - H100.fixed_s < 0.12 * whole_s
    assert many_s - H100.fixed_s > whole_s


def test_layers_with_a_window_read_no_more_than_it() -> None:
    gemma = {**LLAMA_8B, "model_type": "gemma3_text", "sliding_window": 512}
    windows = layer_windows(model_config(gemma))
    assert windows.count(None) == 32 // 6
    assert windows[5] is None
    mine = Speed(hardware=hardware(), expert_weights_s=0.0, expert_share=0.0, windows=(100, None))
    assert mine._num_seen(50) == 50
    assert mine._num_seen(1100) == (100 + 1100) // 2
    assert mine._num_pairs(0, 3) == 6
    # Behind the window each token has a hundred before it, or all.
    assert mine._num_pairs(1000, 2) == (2 * 100 + 1001 + 1002) // 2


def test_windows_are_as_the_family_says() -> None:
    mistral = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
    assert set(layer_windows(model_config(mistral))) == {4096}
    qwen2 = {**mistral, "model_type": "qwen2", "max_window_layers": 30}
    assert set(layer_windows(model_config(qwen2))) == {None}
    windows = layer_windows(model_config(qwen2, use_sliding_window=True))
    assert windows == (*[None] * 30, 4096, 4096)


def test_measured_costs_take_the_place_of_the_data_sheet() -> None:
    config, engine = model_config(), engine_config()
    parameters = count_parameters(config)
    memory = plan_memory(config, parameters, engine, H100)
    measured = {"fixed_s": 0.5, "weights_s": 0.0, "num_kv_tokens": 7, "max_num_seqs": 1}
    mine = plan_speed(config, parameters, engine, H100, memory, measured=measured)
    assert mine.hardware.fixed_s == 0.5
    assert mine.hardware.num_kv_tokens == memory.num_blocks * memory.block_size
    assert mine.hardware.max_num_seqs == engine.max_num_seqs


@pytest.mark.parametrize("lengths", [(200, 2000), (2000, 200), (8000, 300), (30_000, 50)], ids=str)
def test_no_other_split_serves_more(lengths: tuple[int, int]) -> None:
    work = Work(num_input_tokens=lengths[0], num_output_tokens=lengths[1], tpot_s=0.05)
    best = plan(model_config(), work=work, max_num_seqs=64).split
    assert best.num_prefill + best.num_decode == 8
    for num_prefill in range(1, 8):
        other = replace(best, num_prefill=num_prefill, num_decode=8 - num_prefill)
        assert other.rate <= best.rate


def test_more_input_takes_more_prefill_workers() -> None:
    def num_prefill(num_in: int, num_out: int) -> int:
        work = Work(num_input_tokens=num_in, num_output_tokens=num_out, tpot_s=0.05)
        return plan(model_config(), work=work, max_num_seqs=64).split.num_prefill

    numbers = [num_prefill(*lengths) for lengths in ((200, 2000), (2000, 200), (30_000, 50))]
    assert numbers[0] == 1
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 6


def test_one_worker_does_both() -> None:
    config, engine = model_config(), engine_config()
    parameters = count_parameters(config)
    memory = plan_memory(config, parameters, engine, H100)
    work = Work(num_input_tokens=100, num_output_tokens=10, tpot_s=0.05)
    split = plan_split(work, speed(), speed(), memory, num_workers=1)
    assert (split.num_prefill, split.num_decode) == (0, 1)
    assert split.rate == split.aggregated_rate == split.aggregated.rate


def test_an_objective_limits_how_many_run_at_once() -> None:
    fast = Work(num_input_tokens=2000, num_output_tokens=200, tpot_s=0.0095)
    found = plan(model_config(), work=fast, max_num_seqs=256).split.decode
    assert 1 < found.num_seqs < 64
    assert found.tpot_s <= 0.0095
    one_more_s = speed().decode_step_s(found.num_seqs + 1, fast.mean_context_len)
    assert one_more_s > 0.0095
    impossible = plan(model_config(), work=replace(fast, tpot_s=0.001))
    assert impossible.split.decode.num_seqs == 1
    assert "no split can meet it" in impossible.warnings[-1]


def test_costs_are_worker_seconds() -> None:
    found = plan(model_config(), price_per_hour=3.6)
    split, work, costs = found.split, found.work, found.costs
    assert costs is not None
    # A tenth of a cent a second: one worker's seconds of a million tokens, in thousandths.
    assert costs.input == pytest.approx(1e3 / (split.prefill.rate * 2000))
    assert costs.output == pytest.approx(1e3 / (split.decode.rate * 200))
    spent = 8 * 1e-3 / (split.rate * work.num_tokens) * 1e6
    assert costs.blended == pytest.approx(spent)
    assert plan_costs(work, split, price_per_hour=0.0).blended == 0.0


def test_requests_that_no_engine_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at most 131072"):
        plan(model_config(), work=Work(num_input_tokens=131_000, num_output_tokens=99, tpot_s=1.0))
    with pytest.raises(ValueError, match="at least one in and out"):
        Work(num_input_tokens=0, num_output_tokens=1, tpot_s=1.0)


def test_a_step_that_needs_more_than_is_left_is_warned_of() -> None:
    found = plan(model_config(), max_num_seqs=512)
    assert found.warnings
    assert "engine.max_num_seqs" in found.warnings[0]
    assert not plan(model_config(), max_num_seqs=8, max_model_len=8192).warnings


def test_the_closed_form_agrees_with_the_simulator() -> None:
    """Requests of one length, more of them than any split can serve."""
    work = Work(num_input_tokens=3072, num_output_tokens=64, tpot_s=0.05)
    engine = engine_config(max_num_seqs=8)
    config = model_config()
    parameters = count_parameters(config)
    memory = plan_memory(config, parameters, engine, H100)
    own = plan_speed(config, parameters, engine, H100, memory, measured={})
    split = plan_split(work, own, own, memory, num_workers=4)
    requests = [
        TraceRequest(
            arrived_s=0.001 * number,
            num_prompt_tokens=work.num_input_tokens,
            num_output_tokens=work.num_output_tokens,
            block_ids=tuple(range(100 * number, 100 * number + 6)),
        )
        for number in range(80)
    ]
    trace = Trace(name="even", requests=requests)
    served = {}
    for num_prefill in (1, 2, 3):
        spec = ClusterSpec(
            num_prefill=num_prefill,
            num_decode=4 - num_prefill,
            hardware=own.hardware,
            local_prefill="never",
        )
        served[num_prefill] = find_saturation(spec, trace, "relevo", seed=1)
    assert max(served, key=lambda number: served[number]) == split.num_prefill
    assert served[split.num_prefill] == pytest.approx(split.rate, rel=0.2)
