"""Requests, and the steps that answer one or several of them."""
