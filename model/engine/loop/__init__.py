"""Requests, and the steps that answer them."""
