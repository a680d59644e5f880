"""The worker's own kernels for the CPU, in C++, and what Python needs to build and call them."""
