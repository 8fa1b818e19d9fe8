"""The coins of scheduled sampling."""

import torch
from support.decode_oracle import make_decoder
from support.decoding import VOCABULARY, run

import accumext


def test_scheduled_draws_per_token_and_repeats_under_a_generator():
    decoder = make_decoder("gru_cell", batch=50)
    targets = torch.randint(VOCABULARY, (40, 50))

    def seeded(feedback: str, seed: int) -> accumext.DecodeOutput:
        share = {"teacher_forcing": 0.3} if feedback == "scheduled" else {}
        generator = torch.Generator().manual_seed(seed)
        return run(decoder, targets=targets, feedback=feedback, generator=generator, **share)

    for feedback in ("scheduled", "sample"):
        one, same, other = seeded(feedback, 1), seeded(feedback, 1), seeded(feedback, 2)
        assert torch.equal(one.inputs, same.inputs)
        assert not torch.equal(one.inputs, other.inputs)
    out = seeded("scheduled", 1)
    told_apart = out.tokens[:-1] != targets[:-1]
    forced = (out.inputs[1:] == targets[:-1])[told_apart].double()
    # 1,800 coins of probability 0.3 have a standard deviation of 0.011
    assert abs(forced.mean() - 0.3) < 0.055


def test_options_that_have_no_effect_may_be_left_as_they_are():
    decoder = make_decoder("gru_cell")
    for options in (
        {"feedback": "greedy", "teacher_forcing": 0.0},
        {"feedback": "sample", "teacher_forcing": 1, "temperature": 2.0},
        {"feedback": "scheduled", "teacher_forcing": 1.0},  # at the begin of a schedule
        {"feedback": "greedy", "generator": torch.Generator()},
    ):
        assert run(decoder, **options).loss.isfinite()
