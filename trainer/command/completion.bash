# bash: the commands, the words and options of a command's help, and files where it has none
_meshloom() {
  local words word=${COMP_WORDS[COMP_CWORD]}
  words=$(meshloom "${COMP_WORDS[@]:1:COMP_CWORD-1}" --help 2>/dev/null)
  if [[ $word == -* ]]; then
    words=$(grep -oE -e '--[a-z-]+' <<<"$words")
  else
    words=$(sed -nE 's/^ +(meshloom )?([a-z]+)  .*/\2/p' <<<"$words")
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _meshloom meshloom
