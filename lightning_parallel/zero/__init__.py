"""Mechanism: optimizer state, gradients and parameters sharded over data replicas (Rajbhandari et al. 2020)."""
