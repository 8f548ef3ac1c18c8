import gc
import sys

gc.disable()  # nearly all that is imported stays: to look through it again and again takes half a second
try:
    from .app import main
finally:
    gc.enable()

if __name__ == "__main__":  # workers import this file by another name
    sys.exit(main())
