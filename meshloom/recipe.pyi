from trainer.recipe import *
