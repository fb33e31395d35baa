"""The loss of a rank: sums, never means, in fp32, and a gradient path whatever the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flexcp.core.errors import UnsupportedError
from flexcp.runtime import loss
from flexcp.runtime.loss import shift_labels, token_loss_sum


def make_rows(
    rows: int, vocab: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(1, rows, vocab, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[::3] = -100
    return logits.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize(
    ("labels", "targets"),
    [([5], [-100]), ([5, 6, 7], [6, 7, -100]), ([-100, 3, -100, 4], [3, -100, 4, -100]), ([], [])],
)
def test_a_target_is_the_label_of_the_next_row(labels: list[int], targets: list[int]) -> None:
    """D15: and the labels given are left alone."""
    given = np.array(labels, dtype=np.int64)
    assert shift_labels(given).tolist() == targets
    assert given.tolist() == labels


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The sum and its gradient equal F.cross_entropy, whether rows fit one chunk or need six."""
    for chunk in (1, 8, 2048):
        monkeypatch.setattr(loss, "_CHUNK_ROWS", chunk)
        logits, targets = make_rows(rows)
        total = token_loss_sum(logits, targets)
        total.backward()
        plain = logits.detach().clone().requires_grad_()
        expected = F.cross_entropy(plain[0], targets, reduction="sum")
        expected.backward()
        torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)
        torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_nothing_supervised_is_an_exact_zero_with_a_gradient(rows: int) -> None:
    """D01: no division by a local count of zero, and a backward that runs, so that neighbours are served."""
    logits, _ = make_rows(rows, dtype=torch.float32)
    total = token_loss_sum(logits, torch.full((rows,), -100))

    assert total.item() == 0.0
    assert total.requires_grad
    total.backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape
    assert (logits.grad == 0).all()


def test_low_precision_logits_are_summed_in_fp32() -> None:
    """A bf16 sum of thousands of losses would stop growing at 256 times its smallest term."""
    logits, targets = make_rows(5000, dtype=torch.bfloat16)
    total = token_loss_sum(logits, targets)
    exact = F.cross_entropy(logits[0].double(), targets, reduction="sum")

    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=1e-6)
    total.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_low_precision_gradients_are_those_of_torch() -> None:
    """Scaled in fp32, so that only the gradient itself is rounded to bf16, never the divisor."""
    logits, targets = make_rows(600, dtype=torch.bfloat16)
    (token_loss_sum(logits, targets) / 1003).backward()
    plain = logits.detach().clone().requires_grad_()
    (F.cross_entropy(plain[0].float(), targets, reduction="sum") / 1003).backward()

    torch.testing.assert_close(logits.grad, plain.grad, rtol=2**-7, atol=1e-12)  # one bf16 step at most


def test_nothing_of_the_size_of_the_logits_is_kept_in_fp32() -> None:
    """What autograd keeps until backward: the logits themselves, and the targets."""
    logits, targets = make_rows(3000, vocab=50, dtype=torch.bfloat16)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        token_loss_sum(logits, targets)

    assert sum(kept) == 3000 * 50 * 2 + 3000 * 8


def test_a_second_backward_adds_the_same_again() -> None:
    """Nothing that backward needs is changed by it."""
    logits, targets = make_rows(5)
    total = token_loss_sum(logits, targets)
    total.backward(retain_graph=True)
    once = logits.grad.clone()
    total.backward()

    torch.testing.assert_close(logits.grad, 2 * once, rtol=0, atol=0)


@pytest.mark.parametrize("targets", [4, 6])
def test_rows_and_targets_are_counted(targets: int) -> None:
    """Fewer targets would leave the gradient of the last rows to chance."""
    logits, _ = make_rows(5)

    with pytest.raises(UnsupportedError, match=f"logits for 5 rows, the micro-batch has {targets}"):
        token_loss_sum(logits, torch.zeros(targets, dtype=torch.int64))
