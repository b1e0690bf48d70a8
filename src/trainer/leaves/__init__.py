"""Code that checkpoint formats share: named arrays that are read piece by piece, readers for Orbax trees and GGUF
headers, and a model's metadata."""
