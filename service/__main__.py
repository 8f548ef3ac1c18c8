import gc
import os
import sys

# PyTorch's allocator on Arm, which reads this when it is loaded, would keep what loading a model took for a while.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
gc.disable()  # nearly all that is imported stays: to look through it again and again takes half a second
try:
    from .app import main
finally:
    gc.freeze()
    gc.enable()

if __name__ == "__main__":  # workers import this file by another name
    sys.exit(main())
