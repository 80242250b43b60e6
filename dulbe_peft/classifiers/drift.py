"""temporary"""

import torch


def linear_map(before: torch.Tensor, after: torch.Tensor, ridge: float = 1e-2) -> torch.Tensor:
    b, a = before.double(), after.double()
    g = b.T @ b
    lam = ridge * g.diagonal().mean() * torch.eye(len(g), dtype=torch.float64)
    return torch.linalg.solve(g + lam, b.T @ a + lam)
