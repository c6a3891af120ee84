"""The largest number of a row is found where torch finds it."""

import pytest
import torch

from engine.sampling.largest import find_largest


@pytest.mark.parametrize("width", [1, 128, 512, 1000, 49157])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_the_first_of_the_largest(dtype: torch.dtype, width: int):
    torch.manual_seed(width)
    rows = torch.randn(40, width, dtype=dtype)
    rows[1] = rows[1].round()  # many are equal
    rows[2] = -torch.inf
    rows[3, width // 2 :] = torch.inf
    rows[4, width - 1] = torch.nan
    rows[5, width // 3] = torch.nan
    rows[5, 0] = torch.inf
    rows[6, width - 1] = 100.0
    values, places = find_largest(rows)
    assert torch.equal(places, rows.argmax(dim=-1))
    assert torch.equal(
        values.nan_to_num(7.0, 8.0, 9.0), rows.amax(dim=-1).nan_to_num(7.0, 8.0, 9.0)
    )


def test_a_view_of_some_columns():
    rows = torch.randn(3, 2000)[:, 100:1900]
    assert torch.equal(find_largest(rows)[1], rows.argmax(dim=-1))


@pytest.mark.parametrize("width", [10, 512, 1000])
def test_a_step_without_a_row_to_sample_has_none(width: int) -> None:
    values, places = find_largest(torch.empty(0, width))
    assert values.shape == places.shape == (0,)
