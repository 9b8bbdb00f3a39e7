"""What every test shares: the modules in the repository's root, and runs that repeat exactly."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

# Many tiny models: more threads than this only wait for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
