"""Kernels: fixed-tree operations. They know tensors, never models or requests.

Where does my class go?
- `tree.py`: everything that moves bits, versioned and hashed into the fingerprint.
- `contract.py`: what every backend offers, operation by operation, with its tree.
- `reference.py`: the same trees spelled out slowly; the tests' ground truth.
- `cpu/`: the native C++ form and the torch form for machines without a compiler.
- `cuda/`: the Triton forms. `plain.py`: torch without fixed trees (the control).
"""
