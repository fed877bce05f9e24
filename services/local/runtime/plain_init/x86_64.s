.intel_syntax noprefix
    mov eax, 157            # prctl(PR_SET_DUMPABLE, 0)
    mov edi, 4
    xor esi, esi
    syscall
    push 0                  # struct sigaction: no mask, no restorer, no flags, SIG_IGN
    push 0
    push 0
    push 1
    mov eax, 13             # rt_sigaction(SIGCHLD, rsp, NULL, 8)
    mov edi, 17
    mov rsi, rsp
    xor edx, edx
    mov r10d, 8
    syscall
    mov ebx, 0x7f7f7f7f     # the lifeline
    mov eax, 436            # close_range(3, lifeline - 1, 0)
    mov edi, 3
    lea esi, [rbx - 1]
    syscall
    mov eax, 436            # close_range(lifeline + 1, ~0, 0)
    lea edi, [rbx + 1]
    mov esi, -1
    syscall
again:
    mov [rsp], rbx          # struct pollfd
    mov byte ptr [rsp + 4], 1
    mov eax, 271            # ppoll(rsp, 1, NULL, NULL, 8)
    mov rdi, rsp
    mov esi, 1
    xor edx, edx
    xor r10d, r10d
    mov r8d, 8
    syscall
    xor eax, eax            # read(lifeline, rsp, 8)
    mov edi, ebx
    mov rsi, rsp
    mov edx, 8
    syscall
    cmp eax, 0
    jg again
    cmp eax, -11            # EAGAIN
    je again
    cmp eax, -4             # EINTR
    je again
    mov eax, 231            # exit_group(0)
    xor edi, edi
    syscall
