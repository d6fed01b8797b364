"""Fault runs: the product in real processes on real databases, and everything that can happen to them."""
