import gc

from rpc.start_imports import import_whole


def test_what_is_imported_is_passed_over_by_later_looks_for_garbage() -> None:
    num_frozen = gc.get_freeze_count()
    try:
        assert import_whole("colorsys").__name__ == "colorsys"
        assert gc.get_freeze_count() > num_frozen
        assert gc.isenabled()
    finally:
        gc.unfreeze()
