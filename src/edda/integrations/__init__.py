"""What connects Edda to other programs; each needs an extra of the package."""
