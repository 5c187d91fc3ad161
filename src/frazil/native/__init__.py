"""Compiled code: loops over bytes and Arrow buffers, compiled by numba. Runs on executors."""
