"""What torch calls at the end of `import torch` (entry point torch.backends): makes the backend
"ringfold" known. It must never break that import, so it touches nothing else before it is used."""


def _create(store, rank, size, timeout):
    import ringfold.torch

    return ringfold.torch._create(store, rank, size, timeout)


def load() -> None:
    try:
        import torch.distributed as dist

        if dist.is_available() and "ringfold" not in dist.Backend.backend_list:
            dist.Backend.register_backend("ringfold", _create, devices=["cpu", "cuda"])
    except Exception:  # whatever it is, torch works without us
        pass
