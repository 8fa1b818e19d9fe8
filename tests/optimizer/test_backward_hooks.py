"""Bundles of gradients that a backward pass hands over."""

from __future__ import annotations

import time
from threading import Thread

import torch
from torch import nn

from accumext.optimizer._backward_hooks import GradCollector


def test_threads_of_two_devices_take_turns():
    """A backward pass runs on a thread per device, and the window is one."""
    inside, most = [], []

    def take(grads, foreign):
        inside.append(grads)
        time.sleep(0.05)
        most.append(len(inside))
        inside.pop()

    intake = GradCollector("op", take)
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    threads = [Thread(target=intake._hand_over, args=([p],)) for p in parameters]
    for parameter, thread in zip(parameters, threads):
        parameter.grad = torch.ones(1)
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1]
    assert [p.grad for p in parameters] == [None, None]
