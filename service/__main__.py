import sys

from .app import main

if __name__ == "__main__":  # workers import this file by another name
    sys.exit(main())
