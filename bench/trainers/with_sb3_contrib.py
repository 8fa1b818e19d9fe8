"""sb3-contrib's RecurrentPPO: a step for each minibatch, no accumulation."""

import gymnasium
import numpy
from _factors import LR, Seen, main
from sb3_contrib import RecurrentPPO

STEPS, ROWS = 40, 16  # of a rollout, of a minibatch


class Endless(gymnasium.Env):
    """One episode that never ends, so that nothing else cuts a rollout."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return numpy.zeros(2, numpy.float32), {}

    def step(self, action):
        observation = self.np_random.uniform(-1, 1, 2).astype(numpy.float32)
        return observation, float(action), False, False, {}


def trained(rows, epochs=5):
    """For each minibatch the lengths of its sequences; and the steps of the optimizer."""
    model = RecurrentPPO(
        "MlpLstmPolicy",
        Endless(),
        n_steps=STEPS,
        batch_size=rows,
        n_epochs=epochs,
        learning_rate=LR,
        seed=0,
        device="cpu",
    )
    get, lengths, steps = model.rollout_buffer.get, [], []

    def batches(size):
        for data in get(size):
            sequences = data.lstm_states.pi[0].shape[1]
            lengths.append(data.mask.reshape(sequences, -1).sum(1).int().tolist())
            yield data

    model.rollout_buffer.get = batches
    model.policy.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    model.learn(STEPS)
    return lengths, len(steps)


def train(seen: Seen):
    lengths, steps = trained(ROWS, epochs=1)
    sizes = ", ".join(str(sum(each)) for each in lengths)
    cut = "; ".join(" and ".join(map(str, each)) for each in trained(STEPS)[0])
    seen.facts["notes"] = [
        f"{steps} steps, one for each minibatch of {sizes} transitions",
        f"with one minibatch of all {STEPS}, of one episode, sequences of {cut}",
    ]


if __name__ == "__main__":
    main("sb3-contrib", {"RecurrentPPO, rollouts of 40, batch_size=16": {"plain": train}})
