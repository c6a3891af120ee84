from sim.agenda import Agenda


def test_things_happen_in_order_of_time_and_then_of_planning() -> None:
    agenda, seen = Agenda(), []
    agenda.at(2.0, lambda: seen.append("late"))
    agenda.at(1.0, lambda: seen.append("first"))
    agenda.at(1.0, lambda: agenda.after(0.0, lambda: seen.append("third")))
    agenda.at(1.0, lambda: seen.append("second"))
    agenda.run(lambda: False)
    assert seen == ["first", "second", "third", "late"]
    assert agenda.now() == 2.0


def test_time_never_goes_back() -> None:
    agenda, seen = Agenda(), []
    agenda.at(5.0, lambda: agenda.at(1.0, lambda: seen.append(agenda.now_s)))
    agenda.run(lambda: False)
    assert seen == [5.0]


def test_it_stops_when_all_is_over_or_the_time_is_up() -> None:
    agenda, seen = Agenda(), []
    for time_s in (1.0, 2.0, 3.0):
        agenda.at(time_s, lambda: seen.append(agenda.now_s))
    agenda.run(lambda: False, until_s=1.5)
    assert seen == [1.0]
    agenda.run(lambda: len(seen) == 2)
    assert seen == [1.0, 2.0]
