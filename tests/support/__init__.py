"""Code that several tests share: oracles, cases, and programs that tests run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the checkout
