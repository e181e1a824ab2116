"""Handwritten digits with Lightning:  horovodish run -np 2 python examples/lightning_digits.py

`--fully-shard` shards the parameters over the ranks, by FSDP2. Needs: pip install lightning scikit-learn
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import horovodish.torch.backend  # noqa: F401  (makes the backend known to PyTorch)

EPOCHS = 10


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def configure_model(self):
        if self.device_mesh is not None:  # of ModelParallelStrategy
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        images, labels = batch
        loss = functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        images, labels = batch
        right = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)  # the mean over all ranks

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fully-shard", action="store_true")
    arguments = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = torch.utils.data.random_split(digits, [0.8, 0.2])

    if arguments.fully_shard:  # without the two sizes, the ranks of a host would be a tensor-parallel group
        ranks = int(os.environ["WORLD_SIZE"])
        strategy = ModelParallelStrategy(ranks, tensor_parallel_size=1, process_group_backend="horovodish")
    else:
        strategy = DDPStrategy(process_group_backend="horovodish")
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=EPOCHS,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32))
    if trainer.is_global_zero:
        loss, accuracy = (trainer.callback_metrics[name].item() for name in ("loss", "accuracy"))
        backend = torch.distributed.get_backend()
        print(f"{trainer.world_size} ranks on {backend}, last loss {loss:.6f}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
