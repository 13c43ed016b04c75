"""Pretrained models and their tokenizers, out of vendor/."""
