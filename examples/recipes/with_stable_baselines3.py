"""Stable-Baselines3: `optimizer_class` is a function that wraps an optimizer."""

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

import accumext


def optimizer(parameters, lr, **kwargs):
    adam = torch.optim.Adam(parameters, lr=lr, **kwargs)
    return accumext.AccumulatingOptimizer(adam, window=4, max_norm=0.5)


class Flush(BaseCallback):
    def _on_step(self):
        return True

    def _on_rollout_start(self):  # after the updates from the last rollout
        self.model.policy.optimizer.flush()

    def _on_training_end(self):
        self.model.policy.optimizer.flush()


agent = PPO(
    "MlpPolicy",
    gymnasium.make("CartPole-v1"),
    policy_kwargs={"optimizer_class": optimizer, "optimizer_kwargs": {"eps": 1e-5}},
    max_grad_norm=float("inf"),  # its own clipping, of each minibatch
    n_steps=96,
    batch_size=32,
    n_epochs=3,
    seed=0,
    device="cpu",
)
agent.learn(384, callback=Flush())

model = agent.policy
print(f"last window: {model.optimizer.stats()}")
