import pytest

from sim.agenda import Agenda
from sim.devices import DEVICES
from sim.engine import SimEngine
from sim.hardware import MODELS, from_data_sheet, load_hardware
from tests.unit.sim.worlds import Log, engine, hardware, run


def serve(subject: SimEngine, agenda: Agenda, *lengths: tuple[int, int]) -> list[Log]:
    """Prompts at once, each of its own; until all is done."""
    logs = [Log(agenda) for _ in lengths]
    for number, (log, (num_prompt, num_output)) in enumerate(zip(logs, lengths, strict=True)):
        subject.add(log.job(num_prompt, num_output, start=1000 * number))
    run(agenda)
    subject.check_integrity()
    return logs


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    agenda = Agenda()
    (log,) = serve(engine(agenda), agenda, (250, 6))
    assert log.chunks == [(0.1, 100), (0.2, 200), (0.25, 250)]
    assert log.first_token_s == pytest.approx(0.25)
    assert log.ended_s == pytest.approx(0.25 + 5 * 0.01)


def test_a_known_prefix_is_not_computed_again() -> None:
    agenda = Agenda()
    subject = engine(agenda)
    serve(subject, agenda, (200, 1))
    log = Log(agenda)
    subject.add(log.job(250, 1))
    before_s = agenda.now_s
    run(agenda)
    assert log.chunks == [(pytest.approx(before_s + 0.05), 250)]


def test_of_a_prompt_that_is_all_known_the_last_token_is_computed() -> None:
    agenda = Agenda()
    subject = engine(agenda)
    serve(subject, agenda, (200, 1))
    log = Log(agenda)
    job = log.job(200, 1)
    subject.add(job)
    run(agenda)
    assert job.num_cached == 199


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    agenda = Agenda()
    long, short = serve(engine(agenda), agenda, (1000, 1), (40, 1))
    # It came when the first step ran already.
    assert short.first_token_s == pytest.approx(0.2)
    assert [num_tokens for _, num_tokens in long.chunks[:3]] == [100, 160, 260]


def test_decodes_share_each_step() -> None:
    agenda = Agenda()
    logs = serve(engine(agenda), agenda, (10, 11), (10, 11), (10, 11))
    # The first prompt takes a step alone, the others one together, beside its second token.
    ends_s = [log.ended_s for log in logs]
    assert ends_s == [pytest.approx(end_s) for end_s in (0.01 + 0.021 + 0.09, 0.131, 0.131)]


def test_more_than_there_are_places_wait() -> None:
    agenda = Agenda()
    logs = serve(engine(agenda, max_num_seqs=1), agenda, (10, 11), (10, 11))
    assert logs[1].first_token_s == pytest.approx(logs[0].ended_s + 0.01)


def test_who_finds_no_blocks_waits_for_them() -> None:
    agenda = Agenda()
    logs = serve(engine(agenda, num_kv_tokens=300), agenda, (190, 11), (190, 11))
    assert logs[1].first_token_s is not None
    assert logs[0].ended_s is not None
    assert logs[1].first_token_s > logs[0].ended_s


def test_a_kept_prompt_keeps_its_blocks_until_released() -> None:
    agenda = Agenda()
    subject, log = engine(agenda), Log(agenda)
    job = log.job(100, 1, is_kept=True)
    subject.add(job)
    run(agenda)
    assert subject.cache.num_used == 11
    subject.release(job)
    assert subject.cache.num_used == 0


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.11, 0.15])
def test_who_is_cancelled_leaves_nothing(after_s: float) -> None:
    agenda = Agenda()
    subject = engine(agenda, max_num_seqs=2)
    logs = [Log(agenda) for _ in range(3)]
    jobs = [log.job(60, 20, start=1000 * n) for n, log in enumerate(logs)]
    for job in jobs:
        subject.add(job)
    agenda.run(lambda: False, until_s=after_s)
    for job in jobs[:2]:
        subject.cancel(job)
    run(agenda)
    subject.check_integrity()
    assert subject.cache.num_used == 0
    assert [log.ended_s is None for log in logs] == [True, True, False]


def test_who_is_told_of_a_token_may_cancel_at_once() -> None:
    agenda = Agenda()
    subject, log = engine(agenda), Log(agenda)
    first = log.job(30, 1, is_kept=True)
    first.on_token = subject.cancel
    others = [Log(agenda) for _ in range(2)]
    subject.add(log.job(10, 1, start=3000))  # the others come while it runs, for one step together
    for job in (first, *(each.job(30, 5, start=1000 * n) for n, each in enumerate(others, 1))):
        subject.add(job)
    run(agenda)
    subject.check_integrity()
    assert subject.cache.num_used == 0
    assert [each.first_token_s for each in others] == [pytest.approx(0.1)] * 2


def test_it_learns_the_speed_it_has() -> None:
    agenda = Agenda()
    subject = engine(agenda)
    serve(subject, agenda, *[(300, 30)] * 6)
    # The warm-up's own figure counts a step's fixed cost.
    assert subject.rates.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.1)
    assert subject.rates.decode_step_s(1) == pytest.approx(0.01)


def test_a_data_sheet_gives_plausible_speeds() -> None:
    h100 = from_data_sheet(DEVICES["h100"], MODELS["llama-8b"])
    chunk_s = h100.step_s(num_decodes=0, num_kv_tokens=0, num_chunk_tokens=2048, num_pairs=0)
    assert 20_000 < 2048 / chunk_s < 40_000
    step_s = h100.step_s(num_decodes=1, num_kv_tokens=1000, num_chunk_tokens=0, num_pairs=0)
    assert 0.005 < step_s < 0.012
    h200 = load_hardware("h200", model="llama-8b")
    assert h200.num_kv_tokens > 1.8 * h100.num_kv_tokens
    assert h200.kv_token_s < h100.kv_token_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"token_s": -1}', "token_s = -1"),
        ('{"token": 1}', "unknown 'token'"),
        ("[1]", "expected an object"),
        ('{"max_num_seqs": 0}', "max_num_seqs = 0"),
    ],
)
def test_a_bad_hardware_file_is_refused(tmp_path, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_hardware(str(path), model="llama-8b")


def test_measured_values_replace_those_of_the_data_sheet(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.json"
    path.write_text('{"token_s": 0.001, "num_kv_tokens": 4096}')
    mine = load_hardware(str(path), model="llama-8b")
    assert (mine.token_s, mine.num_kv_tokens) == (0.001, 4096)
    assert hardware().token_s == 0.001
    with pytest.raises(ValueError, match="h100, h200 or a JSON file"):
        load_hardware("h300", model="llama-8b")
    with pytest.raises(ValueError, match="llama-8b, llama-70b"):
        load_hardware("h100", model="gpt")
