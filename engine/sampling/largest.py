"""The largest number of each row and where it stands."""

import torch

# Numbers whose largest one is found by vectors; torch's argmax goes one by one on CPUs.
_WIDTH = 256


def find_largest(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, width] -> values and the first places that have them, each [rows]; NaN is largest."""
    if rows.device.type != "cpu" or rows.shape[-1] < 2 * _WIDTH:
        places = rows.argmax(dim=-1, keepdim=True)
    else:
        places = _find_by_pieces(rows)
    return rows.gather(-1, places)[:, 0], places[:, 0]


def _find_by_pieces(rows: torch.Tensor) -> torch.Tensor:
    width = rows.shape[-1]
    whole = width // _WIDTH * _WIDTH
    largest = rows[:, :whole].view(len(rows), whole // _WIDTH, _WIDTH).amax(dim=-1)
    if whole < width:
        largest = torch.cat((largest, rows[:, whole:].amax(dim=-1, keepdim=True)), dim=-1)
    piece = largest.argmax(dim=-1, keepdim=True)
    places = (piece * _WIDTH + torch.arange(_WIDTH)).clamp(max=width - 1)
    place: torch.Tensor = rows.gather(-1, places).argmax(dim=-1, keepdim=True)
    return places.gather(-1, place)
