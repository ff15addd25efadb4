"""Builds the wheel; everything is in pyproject.toml."""

from setuptools import setup

setup()
