"""Durable Timer: a service that makes waiting durable."""
