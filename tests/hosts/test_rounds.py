"""Ranks on two hosts that take steps of their own: what crosses the link, and which ranks step alike."""

from __future__ import annotations

import pytest

from support.hosts import Hosts, hosts, run_on_hosts

ELEMENTS = 1 << 20
STEPS = 16


def train(policy: str) -> None:
    import torch

    import horovodish.torch as hvd

    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    sync = hvd.LocalSGD(8) if policy == "LocalSGD" else hvd.Hierarchical("host", every=4)
    options = {"sync": sync} if policy else {}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        (parameter * float(hvd.rank())).sum().backward()
        optimizer.step()
        if policy == "Hierarchical":
            met = (step + 1) // 4 * 4
            expected = -1.5 * met - (step + 1 - met) * (hvd.rank() // 2 * 2 + 0.5)
            torch.testing.assert_close(parameter.detach(), torch.full((ELEMENTS,), expected))
    everybody = (hvd.size() - 1) / 2
    torch.testing.assert_close(parameter.detach(), torch.full((ELEMENTS,), -STEPS * everybody))


def sent(on: Hosts, layout: list[int], policy: str) -> int:
    before = on.sent_bytes()
    run_on_hosts(train, on, layout, args=(policy,))
    return max(after - start for start, after in zip(before, on.sent_bytes(), strict=True))


@pytest.mark.soak
def test_what_crosses_the_link() -> None:
    with hosts(2) as two_hosts:
        synchronous = sent(two_hosts, [1, 1], "")
        assert synchronous > STEPS * 4 * ELEMENTS
        assert sent(two_hosts, [1, 1], "LocalSGD") < 1.02 * synchronous / 8
        assert sent(two_hosts, [2, 2], "Hierarchical") < 1.02 * synchronous / 4
