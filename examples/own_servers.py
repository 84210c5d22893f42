"""Asynchronous SGD in a loop of your own: no rank waits for another, and each sends its gradients when it has them.

python examples/own_servers.py
torchrun --nproc-per-node 4 examples/own_servers.py
"""

import os

import torch
import torch.nn.functional as F

import colossus.server as ps


def main() -> None:
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))

    handles = {param: ps.init(param, optimizer=dict(type="momentum", lr=0.02)) for param in net.parameters()}
    for step in range(200):
        for received in [ps.receive(handle, into=param) for param, handle in handles.items()]:
            received.wait()
        labels = torch.randint(0, 10, (64,))
        loss = F.cross_entropy(net(centres[labels] + torch.randn(64, 32)), labels)
        net.zero_grad()
        loss.backward()
        for handle in handles.values():
            ps.prefetch(handle)  # for the next step: without what is sent now
        for param, handle in handles.items():
            ps.send(handle, param.grad, "gradient")
        if step % 50 == 49:
            print(f"rank {rank}, step {step + 1}: loss {loss.item():.4f}", flush=True)
    for handle in handles.values():
        ps.free(handle)
    ps.close()


if __name__ == "__main__":
    main()
