from trainer.errors import *
