"""A function that learns handwritten digits on every rank, for ray_digits.py and spark_digits.py."""

GLOBAL_BATCH = 64


def train(epochs):
    """Train a small network together with the other ranks, and return its accuracy on the test set."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import horovodish.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(torch.tensor(images).float() / 16, torch.tensor(labels), test_size=0.2, random_state=0)
    train_images, test_images, train_labels, test_labels = parts
    data = TensorDataset(train_images, train_labels)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=max(1, GLOBAL_BATCH // hvd.size()), sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, wanted in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), wanted).backward()
            optimizer.step()
    accuracy = (model(test_images).argmax(dim=1) == test_labels).float().mean().item()
    print(f"rank {hvd.rank()} of {hvd.size()} has learned: test accuracy {accuracy:.4f}", flush=True)
    return accuracy
