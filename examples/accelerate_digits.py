"""Handwritten digits with Accelerate:  horovodish run -np 2 python examples/accelerate_digits.py

Needs: pip install accelerate scikit-learn
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import horovodish.torch.backend  # noqa: F401  (makes the backend known to PyTorch)

EPOCHS = 10


def main():
    dist.init_process_group("horovodish")  # before Accelerator(), which takes the group that is there
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = torch.utils.data.random_split(digits, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer, loader, tests = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(test, batch_size=32),
    )

    for _ in range(EPOCHS):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    right = []
    with torch.no_grad():
        for images, labels in tests:
            right.append(accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels))
    accuracy = torch.cat(right).float().mean().item()
    ranks, backend = accelerator.num_processes, dist.get_backend()
    accelerator.print(f"{ranks} ranks on {backend}, last loss {loss.item():.6f}, test accuracy {accuracy:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
